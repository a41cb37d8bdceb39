"""HTTP in front of the parsers and a backend."""

from gateway.app import create_app
from gateway.settings import Settings, SettingsError

__version__ = "0.1.0"
__all__ = ["Settings", "SettingsError", "__version__", "create_app"]
