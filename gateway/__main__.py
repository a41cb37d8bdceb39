"""`python -m gateway` is `bathyal`."""

import sys

from gateway.cli import main

sys.exit(main())
