# The image of docker/kuberay.yml: that of the Dockerfile, with Ray, and the wget of KubeRay's probes. It has not been built.
#   docker build -t outrider:0.1.0 . && docker build -f docker/kuberay.Dockerfile -t outrider-ray:0.1.0 .
FROM outrider:0.1.0
USER root
RUN apt-get update && apt-get install -y --no-install-recommends wget
COPY constraints.txt .
RUN grep '^pip==' constraints.txt > pip.txt && pip install --require-hashes -r pip.txt \
    && pip --python /opt/outrider/bin/python install -c constraints.txt 'ray[serve]==2.60.0'
USER 10001:10001
ENTRYPOINT []
