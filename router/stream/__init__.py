"""What the engines publish, as batches in order.

`sequence` and `replay` decide (no I/O, no clock of their own); `subscriber` and `loadstream` hold the sockets; `pump`
shares the event loop between them.
"""
