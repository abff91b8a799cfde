"""Models: a request in, speech out."""

import os

# onnxruntime creates a telemetry database in ~/.cache when it is imported. Only this variable prevents that:
# the function `disable_telemetry_events` can only be called afterwards.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
