"Imports the public names of fastaccum, for `from fastaccum.all import *`."
from fastaccum import *
from fastaccum import __all__
