"""Run a command and print its peak memory in GiB as the last line: python peak_memory.py COMMAND...

A small process of its own: Linux counts the memory of a parent as that of the child that it starts.
"""

import resource
import subprocess
import sys

if __name__ == "__main__":
    exit_code = subprocess.call(sys.argv[1:])
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
    print(peak / 2**30)
    sys.exit(exit_code if exit_code >= 0 else 128 - exit_code)  # a signal as a shell reports it
