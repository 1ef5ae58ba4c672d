"""The weft command: `python -m weft`, or `weft` where the package is installed."""
import signal
import sys

from weft import _core


def main() -> int:
    # As any program of C++: Ctrl-C ends it, and so does a reader of its output that has gone.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if sys.argv[1:2] == ["audit"]:  # calls functions of Python
        from weft.audit.command import command

        return command(sys.argv[2:])
    if not hasattr(_core, "command"):
        print("weft: this package was built without the command; install CLI11, fmt and nlohmann-json "
              "(Debian: libcli11-dev libfmt-dev nlohmann-json3-dev) and build it again", file=sys.stderr)
        return 1
    return int(_core.command(["weft", *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
