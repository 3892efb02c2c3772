"""The parts of pages that follow from the code: tables of settings and of metrics, and a JSON schema."""
