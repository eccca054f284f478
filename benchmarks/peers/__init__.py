"""fastaccum beside others that accumulate gradients: the same data, the same model, each used as its own
documentation says"""
