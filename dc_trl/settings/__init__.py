"""What a user writes: fields and their ranges, files, command lines, names of models; and what of it is secret."""
