import sys

from scoring.cli.main import main

sys.exit(main())
