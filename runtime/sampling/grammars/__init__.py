"""Grammars of replies: JSON Schemas, regular expressions and Lark, compiled within limits."""
