"""Callbacks of a training: they decay its learning rate, watch for a collapse, and measure.

They read and steer a trainer; the commands and users import them.
"""
