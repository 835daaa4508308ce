"""A child process: `stubborn` does not end when it is told to, `failing` ends with 3 at once."""

import signal
import sys
import time

if __name__ == "__main__":
    sys.stdin.buffer.readline()
    if sys.argv[1] == "failing":
        sys.exit(3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(600)
