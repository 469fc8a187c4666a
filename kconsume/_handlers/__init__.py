"""From a decorated function to one compiled call: annotations, signature, decoding, binding."""
