"""What pods of a Kubernetes cluster cost; the measurements are in `pods.py`."""

import sys

# Before anything else: whoever looks here first for the official client would find this file.
sys.path.append(sys.path.pop(0))

from pods import main

if __name__ == "__main__":
    main()
