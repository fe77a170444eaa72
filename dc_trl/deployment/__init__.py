"""The policy as it is served: quantization schemes, and the engines that sample in them."""
