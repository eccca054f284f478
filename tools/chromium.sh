#!/bin/sh
# For the tests of the site in a browser: install Chromium where nobody needs to be asked, as root on Debian or Ubuntu.
for name in chromium chromium-browser google-chrome; do command -v "$name" >/dev/null && exit 0; done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo 'Installing Chromium for the tests of the site'
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-liberation >/dev/null &&
        command -v chromium >/dev/null && exit 0
fi
echo 'NO CHROMIUM HERE, and it could not be installed: the site will not be tested in a browser' >&2
exit 1
