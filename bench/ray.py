"""What pools on a Ray cluster cost; the measurements are in `ray_nodes.py`."""

import sys

# Before anything else: whoever looks here first for Ray itself would find this file.
sys.path.append(sys.path.pop(0))

from ray_nodes import main

if __name__ == "__main__":
    main()
