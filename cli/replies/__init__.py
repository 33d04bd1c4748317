"""Replies of `run`: from files and pipes, recorded, resumed, with receipts."""
