"""``python -m prized_gym.cli``."""

import sys

from prized_gym.cli import main

sys.exit(main())
