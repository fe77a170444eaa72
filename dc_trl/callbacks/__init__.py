"""Callbacks of a training: they decay its learning rate, watch for a collapse, measure and export.

They read and steer a trainer; the commands and users import them.
"""
