-- The tables of the warehouse. Those of kconsume are made by kconsume. No key would hide a click that is there twice.
create table clicks (
    id bigint not null,
    visitor text not null,
    page text not null,
    at timestamptz not null,
    milliseconds int not null
);
create table pages (page text primary key, clicks bigint not null);
