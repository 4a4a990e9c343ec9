"""What a message with weights has beside their numbers."""

Piece = tuple[str, tuple[int, ...]]
"""Name and shape of a tensor in a parcel."""
