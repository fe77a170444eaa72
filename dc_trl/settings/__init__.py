"""What a user writes: fields with their ranges, rules between them, command lines, paths, names of models.

Everything above may import it; it imports `secrets` and `version` alone.
"""
