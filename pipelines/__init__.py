"""Models: a request in, speech out."""

import os

# onnxruntime opens a database of telemetry below ~/.cache as it is imported, and only its environment keeps
# it from that: its call `disable_telemetry_events` comes too late.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
