"""What a user writes: fields with their ranges, files, command lines, names of models, and which of it is secret."""
