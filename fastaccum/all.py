"What `from fastaccum.all import *` brings: what users type."
from fastaccum import *
from fastaccum import __all__
