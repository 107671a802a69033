# localtrain for CPUs, or with extras of pyproject.toml for other places:
#   docker build -t localtrain .
#   docker build -t localtrain:cuda12 --build-arg EXTRAS=cuda12,gcs .
# podman and buildah build it as well. Use, size and what is checked: docs/container.md.

FROM python:3.12-slim AS build
ARG EXTRAS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src

# Dependencies first, from pyproject.toml alone: a change of the source does not install them again.
# Their byte code stays (85 MB): without it a start takes three times as long, and a user who
# may not write here pays at every start. The tests of numpy and scipy (50 MB) go.
COPY pyproject.toml ./
RUN python -c "import sys, tomllib; \
    file = tomllib.load(open('pyproject.toml', 'rb')); \
    offered = file['project']['optional-dependencies']; \
    extras = [extra for extra in sys.argv[1].split(',') if extra]; \
    own = {extra for extra in offered if any('localtrain' in need for need in offered[extra])}; \
    bad = set(extras) - (set(offered) - own); \
    bad and sys.exit(f'EXTRAS={sys.argv[1]}: {sorted(bad)} not in {sorted(set(offered) - own)}'); \
    needs = file['build-system']['requires'] + file['project']['dependencies']; \
    print(*needs, *[need for extra in extras for need in offered[extra]], sep='\n')" \
    "$EXTRAS" > needs.txt \
 && python -m venv --without-pip /opt/localtrain \
 && pip --python /opt/localtrain/bin/python install -r needs.txt \
 && cd /opt/localtrain/lib/python*/site-packages \
 && find numpy scipy -type d -name tests -prune -exec rm -r {} +

COPY . ./
RUN pip --python /opt/localtrain/bin/python install --no-deps --no-build-isolation --prefix /app .

FROM python:3.12-slim
LABEL org.opencontainers.image.title="localtrain" org.opencontainers.image.licenses="Apache-2.0"
# Any user id works (`docker run --user`, OpenShift): it may write to /workspace, and a fresh volume
# mounted there inherits this mode. HOME is there too, so the cache of compiled programs is kept.
RUN useradd --uid 1000 --home-dir /workspace --no-create-home localtrain \
 && install -d -m 1777 /workspace
COPY --from=build /opt/localtrain /opt/localtrain
COPY --from=build /app /opt/localtrain
ENV PATH=/opt/localtrain/bin:$PATH HOME=/workspace PYTHONUNBUFFERED=1
WORKDIR /workspace
# A number, or Kubernetes cannot see that it is not root (runAsNonRoot).
USER 1000:1000
# Process 1 itself: `docker stop` reaches the run, which saves and exits with 75.
ENTRYPOINT ["localtrain"]
CMD ["--help"]
