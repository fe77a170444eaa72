"""What takes the place of parts of TRL's trainer; docs/code_map.md has the classes and the objects that they hold."""
