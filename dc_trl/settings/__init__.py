"""What a user writes: fields with their ranges, rules between them, files, command lines, names of models.

Everything above may import it; it imports files alone.
"""
