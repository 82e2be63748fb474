"""A judge process that answers a number with 1 if it has so many seconds, and "share" with its seconds."""

import json
import sys


def main() -> None:
    print("{}", flush=True)
    for line in sys.stdin:
        seconds, question = json.loads(line)
        reward = seconds if question == "share" else 1.0 if question <= seconds else None
        print(json.dumps({"reward": reward}), flush=True)


if __name__ == "__main__":
    main()
