"""`python -m skyward` is `sky`."""

from skyward.cli.main import main

main()
