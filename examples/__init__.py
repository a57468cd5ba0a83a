"""What the service is for, as programs to read and to run."""

import os

# The Ray of an example is started, used and stopped by one process alone. Ray reads this once, when it is imported.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
