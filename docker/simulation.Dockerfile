# Simulations on the CPU: `docker build -f docker/simulation.Dockerfile -t remanence .`, then
# `docker run --rm -v "$PWD/results:/results" remanence demo --out /results/demo`
FROM python:3.11-slim-bookworm

COPY docker/requirements.lock /build/
RUN pip install --no-cache-dir --require-hashes --no-deps --requirement /build/requirements.lock

COPY pyproject.toml README.md LICENSE /build/
COPY src /build/src
RUN pip install --no-cache-dir --no-deps --no-build-isolation /build && rm -rf /build \
    && useradd --create-home --uid 1000 remanence && mkdir /results && chown remanence /results

USER 1000
WORKDIR /results
ENTRYPOINT ["remanence"]
CMD ["--help"]
