"""The clock of a program's log, which starts with the process: `hyvideo` imports this file first."""

import time

STARTED = time.monotonic()  # seconds
