"""Once: have git show and merge notebooks cell by cell, with nbdev. `make hooks`

As `nbdev-install-hooks` does, but nothing is written into the working tree or the home directory, and git does not
need the environment to be active; where it is gone, git shows and merges notebooks as text.
"""
import subprocess, sys
from pathlib import Path

root,bin = Path(__file__).resolve().parent.parent,Path(sys.executable).parent

# git gives path, old file, hex, mode, new file, hex, mode; and the names of the base, of ours (where the result goes)
# and of theirs
diff = '''sh -c 'test -x "$0" && exec "$0" "$@"; git --no-pager diff --no-index --no-ext-diff -- "$2" "$5"; true' '''
merge = '''sh -c 'test -x "$0" && exec "$0" "$@"; exec git merge-file "$2" "$1" "$3"' '''

def main():
    def config(key, value): subprocess.run(['git','config','--local',key,value], cwd=root, check=True)
    config('diff.jupyternotebook.command', f'{diff}"{bin}/nbdev-diff-driver"')
    config('merge.jupyternotebook.name', 'resolve conflicts in notebooks with nbdev-merge')
    config('merge.jupyternotebook.driver', f'{merge}"{bin}/nbdev-merge" %O %A %B %P')

if __name__=='__main__': main()
