"""`python -m logitclip` is the command line."""

from logitclip.cli import main

main()
