# A site of a real federation (docs/flower.md): `docker build -f docker/site.Dockerfile -t remanence-site .`. The data, site.toml,
# the key and the certificate of the coordinator are mounted; the states of the clients need a volume that stays:
# `docker run -v "$PWD/ward-7:/site:ro" -v ward-7-state:/state remanence-site flower-supernode --superlink HOST:PORT ...`
FROM python:3.11-slim-bookworm

COPY docker/requirements.lock /build/
RUN pip install --no-cache-dir --require-hashes --no-deps --requirement /build/requirements.lock

COPY pyproject.toml README.md LICENSE /build/
COPY src /build/src
RUN pip install --no-cache-dir --no-deps --no-build-isolation /build && rm -rf /build \
    && useradd --create-home --uid 1000 site && install -d -o site -m 700 /state

USER 1000
WORKDIR /site
ENV FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
VOLUME /state
CMD ["remanence", "flower", "check", "--help"]
