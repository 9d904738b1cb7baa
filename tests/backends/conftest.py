"""vLLM loads Ray where it is installed, and Ray reads once, when it is loaded, whether the network may reach it."""

import os

# as whet sets it before it loads Ray
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
