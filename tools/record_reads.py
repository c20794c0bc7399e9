"""Note which of the shipped data this process reads: executed in a kernel before its first cell.

The first opening of each file below the folder LOWGRAD_DATA appends its name to the file
LOWGRAD_READS. A notebook that carries its data carries these.
"""

import os
import sys


def _record(folder, target):
    start, seen = os.path.join(os.path.abspath(folder), ""), set()

    def note(event, arguments):
        if event != "open" or not isinstance(arguments[0], str) or "w" in (arguments[1] or ""):
            return
        path = os.path.abspath(arguments[0])
        if path.startswith(start) and path not in seen:
            seen.add(path)
            # At once: a kernel that is shut down runs nothing more.
            line = path[len(start) :].replace(os.sep, "/") + "\n"
            handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(handle, line.encode())
            os.close(handle)

    sys.addaudithook(note)


_record(os.environ["LOWGRAD_DATA"], os.environ["LOWGRAD_READS"])
