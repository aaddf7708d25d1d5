"""What models are run on: generated inputs, cases of a caller, a folder of images."""
