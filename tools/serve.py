"Show the site in `_docs`: `python tools/serve.py 8000`, or on the next port that is free."
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

site = Path(__file__).resolve().parent.parent/'_docs'

class Server(ThreadingHTTPServer):
    allow_reuse_address = sys.platform!='win32'   # there it would share a port that is in use

def serve(port, tries=20):
    "A server on `port`, or on one of the next `tries` that is free"
    for p in range(port, port+tries):
        try: return Server(('127.0.0.1', p), partial(SimpleHTTPRequestHandler, directory=str(site)))
        except OSError as e: print(f'port {p}: {e.strerror}')
    sys.exit(f'no port from {port} to {port+tries-1} is free: make docs-serve PORT=9000')

def main(port='8000'):
    if not (port.isdecimal() and 0<int(port)<65516): sys.exit(f'PORT={port}: give a number from 1 to 65515')
    with serve(int(port)) as server:
        print(f'http://127.0.0.1:{server.server_port}/  (Ctrl-C ends it)', flush=True)
        try: server.serve_forever()
        except KeyboardInterrupt: pass

if __name__=='__main__': main(*sys.argv[1:])
