"""The KV cache: its blocks, block tables, prefix index, and states of recurrent layers."""
