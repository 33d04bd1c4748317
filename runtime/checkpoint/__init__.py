"""Folders of tensors: their headers, what they must hold, and reading and writing them safely."""
