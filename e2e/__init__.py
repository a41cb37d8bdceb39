"""Real clients against our server: installed, pointed at loopback, driven through a tool loop.

Not shipped and not part of the suite: it installs packages. `make e2e` runs all of it, `make e2e
ARGS="openai-py codex"` some of it; results go to bench/results/e2e.json and docs/clients.md.
"""
