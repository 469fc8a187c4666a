"""The embedded broker: librdkafka's mock cluster, in this process or shared by name on this machine."""
