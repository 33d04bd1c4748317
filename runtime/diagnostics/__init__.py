"""What tells a person how this installation does: throughput, self-test, memory measured, rules of other engines."""
