"""The tests of csrc with the kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""
