-- The tables of the warehouse. kconsume creates its own tables. clicks has no key: a key would hide a duplicate click.
create table clicks (
    id bigint not null,
    visitor text not null,
    page text not null,
    at timestamptz not null,
    milliseconds int not null
);
create table pages (page text primary key, clicks bigint not null);
