"""What every other package uses: files, messages, inputs, checks of arguments."""
