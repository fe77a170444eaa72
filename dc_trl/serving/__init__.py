"""A vLLM server: started, asked, given new weights, and refused where it does not fit."""
