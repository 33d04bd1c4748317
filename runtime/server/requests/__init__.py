"""What a request asks for: fields, formats, prompts and grammars."""
