"""The parts of pages that follow from the code and from the numbers in docs/data, and a JSON schema."""
