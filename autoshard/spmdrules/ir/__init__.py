"""A jaxpr and the jaxprs nested in it, as operators over numbered values."""
