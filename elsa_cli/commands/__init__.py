"""One command a file; each module offers `command` and imports torch only when it runs."""
